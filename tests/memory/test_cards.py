"""The table of cards, one of them as a plan's limits, and all of them compared."""

import json
import re
from dataclasses import replace

import pytest

import nanoinfer
from nanoinfer.commands import main as cli
from nanoinfer.common.units import GIB
from nanoinfer.memory import forecaster
from nanoinfer.memory.cards import CARDS, LINK_GBPS, card_named
from nanoinfer.memory.compare import compare_gpus
from nanoinfer.memory.machine import DeviceMemory

PLAN = ["plan", "qwen3-4b", "--host-memory", "64GiB"]


def test_cards_are_found_by_what_people_write():
    for name, card in (
        ("RTX 4070", "RTX 4070"), ("rtx4070", "RTX 4070"), ("NVIDIA GeForce RTX 4070 Ti Super", "RTX 4070 Ti SUPER"),
        ("rtx-3080-12gb", "RTX 3080 12GB"), ("h100", "H100 80GB"), ("RTX A2000", "RTX A2000 12GB"),
        ("3060", "RTX 3060"), ("RTX 3060 12GB", "RTX 3060"), ("rtx3060 12 GiB", "RTX 3060"),
        ("3060-8g", "RTX 3060 8GB"),
        ("4070ti super", "RTX 4070 Ti SUPER"), ("GeForce 4060 Ti 16 GB", "RTX 4060 Ti 16GB"), ("a4000", "RTX A4000"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"), ("4090 mobile", "RTX 4090 Laptop"),
        ("RTX 3080 Max-Q 16GB", "RTX 3080 16GB Laptop"), ("Tesla T4", "T4"), ("NVIDIA A100 80GB", "A100 80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("2080 ti 11gb", "RTX 2080 Ti"), ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("titan rtx", "TITAN RTX"), ("2060", "RTX 2060"),
    ):  # fmt: skip
        assert card_named(name).name == card
    for name, message in (
        ("RTX 3080", "sold with more than one memory: give one of RTX 3080 10GB, RTX 3080 12GB"),
        ("3080 20GB", "has no 20 GB: give one of RTX 3080 10GB, RTX 3080 12GB, or state gpu_memory_limit"),
        ("RTX 3090 48GB", "has no 48 GB: give RTX 3090, or state"),
        ("RTX 5070 Tie", r"not in the table \(did you mean 'RTX 5070 Ti'\?\). State its memory and bandwidths"),
        ("RX 7900 XTX", "not in the table, which has NVIDIA's cards: no other maker's was tried yet. State its memory"),
        ("Radeon", r"no other maker's was tried yet. State .* or give one of: RTX 2060, .* RTX 3050"),
        ("GTX 1660", r"not in the table. State"),
        ("", r"not in the table. State"),
    ):
        with pytest.raises(ValueError, match=message):
            card_named(name)
    assert len({card.name for card in CARDS}) == len(CARDS)
    assert all(card.memory_bytes < card.called_gb * 2**30 and card.link_gbps < card.device_gbps for card in CARDS)


def test_every_card_is_found_by_its_own_name_and_by_what_drivers_call_it():
    for card in CARDS:
        assert card_named(card.name) is card_named(card.name.lower().replace(" ", "-")) is card
        assert card_named(f"NVIDIA GeForce {card.name} GPU") is card


def test_a_card_says_what_is_half_or_untried_of_it():
    """Cards with eight lanes, those of laptops, and those whose kind no kernel was tried on; no others."""
    (eight,), (newer,) = card_named("4060 Ti 16GB").notes, card_named("RTX 5060").notes
    assert "RTX 4060 Ti 16GB has 8 lanes, half of what a slot has" in eight
    assert "12.5 GB/s with PCIe 4, 6 in a board with PCIe 3" in eight
    assert "25 GB/s with PCIe 5, 12.5 in a board with PCIe 4" in newer
    (laptop,) = card_named("RTX 4080 Laptop").notes
    assert "makers choose its lanes" in laptop and "nanoinfer doctor" in laptop
    for name in ("T4", "RTX 2080 Ti"):
        (untried,) = card_named(name).notes
        assert "compute capability 7.5, which nobody has tried" in untried and 'dtype="float16"' in untried
    for card in CARDS:
        assert len(card.notes) == (" x8" in card.pcie) + (card.capability < (8, 0)), card.name
        assert " x8" not in card.pcie or card.link_gbps < 0.6 * LINK_GBPS[card.pcie.replace("x8", "x16")]


def test_a_card_stands_for_its_memory_and_bandwidths_where_they_are_not_given():
    card, given = card_named("RTX 4060"), dict(host_memory="64GiB", context=4096, quantization="int4")
    found = nanoinfer.plan("qwen3-4b", gpu="RTX 4060", **given)
    same = nanoinfer.plan("qwen3-4b", gpu_memory="7GiB", link_gbps=12.5, device_gbps=272, **given)
    assert replace(found, notes=()) == same and found.budget_bytes == card.memory_bytes and found.ms_per_token > 0
    other = nanoinfer.plan("qwen3-4b", gpu="RTX 4060", gpu_memory="6GiB", link_gbps=5, device_gbps=100, **given)
    assert (other.budget_bytes, other.link_gbps, other.device_gbps) == (6 * 2**30, 5, 100)


def test_a_plan_says_what_is_special_about_the_card(capsys):
    assert cli.main([*PLAN, "--gpu", "4060", "--context", "8k", "--quantization", "int4"]) == 0
    said = capsys.readouterr().out
    assert (
        "\nnote: RTX 4060 has 8 lanes, half of what a slot has" in said
        and "in a board with PCIe 3 (--link-gbps)" in said
    )
    assert "compute capability 8.9" not in said, "the card has it"
    assert cli.main([*PLAN, "--gpu", "4090", "--context", "8k"]) == 0
    assert "note: " not in capsys.readouterr().out


def test_a_plan_for_another_machine_names_one_amount_of_host_memory():
    """What is available there is what was given: there is no more to give of."""
    plan = nanoinfer.plan("qwen3-32b", gpu="3060", host_memory_limit="20GiB", max_model_len=8192)
    said = r"host_memory_limit='20GiB' is too small for the [\d.]+ GiB of weights that are streamed from there"
    assert re.fullmatch(said, plan.problem) and "available" not in plan.report()
    assert [one for one in plan.advice if "host memory" in one] == list(plan.advice) != []


@pytest.mark.parametrize("place", [dict(gpu_memory_limit="7GiB"), dict(gpu="4060"), dict(gpu="RTX 3060")], ids=str)
def test_kv_in_int8_is_proposed_on_every_card(place):
    asked = dict(max_model_len=32_768, batch=4, host_memory_limit="64GiB", quantization="int4")
    found = nanoinfer.plan("qwen3-4b", **asked, **place)
    (proposal,) = (one for one in found.proposals if one.changes == dict(kv_cache_dtype="int8"))
    assert proposal.what == "KV in int8" and "--kv-cache-dtype int8" in proposal.command
    assert proposal.streamed_bytes_per_step < 0.6 * found.streamed_bytes_per_step


def test_no_card_is_told_to_keep_kv_in_fp8_that_cannot():
    asked = dict(max_model_len=32_768, host_memory_limit="64GiB", kv_cache_dtype="fp8", quantization="int4")
    with pytest.raises(
        ValueError, match=r"needs compute capability 8\.9 \(Ada\) or above, and the GPU has 8\.6: give .*int8"
    ):
        nanoinfer.plan("qwen3-4b", gpu="RTX 3060", **asked)
    assert nanoinfer.plan("qwen3-4b", gpu="RTX 3060", attention_backend="torch", **asked).fits
    assert nanoinfer.plan("qwen3-4b", gpu="RTX 4060", **asked).fits
    found = compare_gpus("qwen3-4b", **asked)
    assert found["RTX 4060"].fits and found["H200"].fits and "8.0: give kv_cache_dtype" in found["A30"].problem


@pytest.mark.parametrize("memory", [{}, dict(cpu_offload_gb=0)], ids=["streams", "does not fit"])
def test_an_old_card_is_told_of_no_weights_whose_kernels_do_not_compile_there(memory):
    asked = dict(max_model_len=4096, host_memory_limit="32GiB", gpu_memory_limit="7GiB", batch=1) | memory
    old, new = (nanoinfer.plan("qwen3-4b", gpu=gpu, **asked) for gpu in ("RTX 2070", "RTX 3070"))
    assert any("quantization" in one.changes for one in new.proposals)
    assert old.fits == (not memory) and not any("quantization" in "".join(one.changes) for one in old.proposals)


def test_the_gpu_of_this_machine_is_asked_what_it_can(monkeypatch):
    def fits(capability, **limits):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
        asked = dict(max_model_len=32_768, kv_cache_dtype="fp8", quantization="int4", host_memory_limit="64GiB")
        return nanoinfer.plan("qwen3-4b", **asked, **limits).fits

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA GeForce RTX 4070")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (11 * GIB, 12 * GIB))
    monkeypatch.setattr(forecaster, "device_memory", lambda _: DeviceMemory(12 * GIB, 11 * GIB))
    assert fits((8, 9))
    with pytest.raises(ValueError, match="8.6: give kv_cache_dtype"):
        fits((8, 6))
    assert fits((8, 6), gpu_memory_limit="10GiB"), "a plan for another machine"


def test_all_cards_are_compared_by_the_plan_of_each(capsys, monkeypatch):
    found = compare_gpus("qwen3-8b", host_memory_limit="64GiB", max_model_len=8192)
    for name in ("RTX 3060", "RTX 4090"):
        alone = nanoinfer.plan("qwen3-8b", gpu=name, host_memory_limit="64GiB", max_model_len=8192)
        assert found[name].fits == alone.fits and found[name].ms_per_token == alone.ms_per_token
    streamed = {name: found[name].memory.streamed_bytes for name in ("RTX 3060", "RTX 4090")}
    assert streamed["RTX 3060"] > 0 == streamed["RTX 4090"] and len(found) == len(CARDS)
    few = CARDS[:3]
    monkeypatch.setattr("nanoinfer.memory.compare.CARDS", few)
    assert cli.main([*PLAN, "--context", "8k", "--compare-gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(few) and lines[2].split()[:2] == ["card", "GiB"]
    assert cli.main([*PLAN, "--compare-gpus", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [card.name for card in few]
    assert cli.main([*PLAN, "--compare-gpus", "--gpu", "L4"]) == 2
    assert "leave out " in capsys.readouterr().err
