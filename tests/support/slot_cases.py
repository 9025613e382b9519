"""Layers whose experts have slots, without a model, and what must hold of them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from nanoinfer.kernels.experts.slot_tables import SlotTables


def make_slots(num_experts: int, num_slots: int, stride: int, num_layers: int = 1) -> list[SlotTables]:
    """Layers of one pool. Their runs are random bytes; all places hold 255 at first."""
    generator = torch.Generator().manual_seed(num_experts + num_slots)
    num_spare = num_experts - num_slots
    pool = torch.full((num_spare + num_layers * num_slots, stride), 255, dtype=torch.uint8)

    def numbers(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    common = dict(pool=pool, table=numbers(num_experts), fetches=numbers(1 + 2 * num_experts), first_spare=0)
    common["victims"] = numbers(num_slots)
    layers = [
        SlotTables(
            home=torch.randint(0, 255, (num_experts, stride), dtype=torch.uint8, generator=generator),
            held=numbers(num_experts),
            owner=numbers(num_slots),
            used=numbers(num_slots, torch.int64),
            clock=numbers(1, torch.int64),
            counts=numbers(4, torch.int64),
            first_slot=num_spare + index * num_slots,
            **common,
        )
        for index in range(num_layers)
    ]
    for one in layers:
        one.forget()
    return layers


def some_choice(generator: random.Random, num_experts: int, num_chosen: int) -> Tensor:
    """Ids of one or more rows, some of them padding; rows may like the same experts."""
    liked = generator.sample(range(num_experts), generator.randint(num_chosen, num_experts))
    num_rows = generator.choice([1, 1, 1, 2, 5, 17])
    rows = [generator.sample(liked, num_chosen) for _ in range(num_rows)]
    rows += [[-1] * num_chosen] * generator.randrange(3)
    return torch.tensor(rows, dtype=torch.int32)


class ChosenLately:
    """By definition what a layer's slots hold: the experts that it took last, and no spare ones."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.num_slots, self.held = num_slots, {}  # expert -> step
        self.step, self.counts = 0, [0, 0, 0, 0]

    def take(self, chosen: list[int]) -> None:
        self.step += 1
        missing = [one for one in chosen if one not in self.held]
        self.counts[0] += len(chosen) - len(missing)
        self.held |= {one: self.step for one in chosen if one in self.held}
        for one in missing:
            if len(self.held) == self.num_slots:
                oldest = min(self.held.values())
                if oldest == self.step:
                    self.counts[2] += 1
                    continue
                # Of those that were chosen in one step any may go.
                self.counts[3] += 1
                del self.held[next(other for other, step in self.held.items() if step == oldest)]
            self.held[one] = self.step
            self.counts[1] += 1


def check_slots(layers: list[SlotTables], number: int, lately: ChosenLately, ids: Tensor, table: Tensor) -> None:
    """Check what a step of layer `number` has done."""
    tables, chosen = layers[number], ids[ids >= 0].unique().tolist()
    for expert, place in enumerate(table.tolist()):
        assert (place >= 0) == (expert in chosen)
        assert place < 0 or torch.equal(tables.pool[place], tables.home[expert]), "the bytes of another expert"
    places = [place for place in table.tolist() if place >= 0]
    assert len(set(places)) == len(places), "two experts in one place"
    before = dict(lately.held)
    lately.take(chosen)
    held = {expert for expert, place in enumerate(tables.held.tolist()) if place >= 0}
    assert len(held) == len(lately.held) and tables.counts.tolist() == lately.counts
    gone = [before[one] for one in before if one not in held]
    stays = [before[one] for one in before if one in held and one not in chosen]
    assert not gone or not stays or max(gone) <= min(stays), "one that was chosen later had to go"
    lately.held = {one: lately.step if one in chosen else before[one] for one in held}
    for one in layers:  # in slots of all layers lies what the tables say
        for slot, owner in enumerate(one.owner.tolist()):
            place = one.first_slot + slot
            assert owner < 0 or one.held[owner] == place and torch.equal(one.pool[place], one.home[owner])
