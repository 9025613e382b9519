"""Addresses of the Hugging Face hub, as a browser or Ollama has them, in place of a model's name."""

from __future__ import annotations

import re

_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.*)", re.IGNORECASE)


def without_address(model: str) -> str:
    """Return the name that an address of the hub stands for, such as "org/name" or "org/name-GGUF:Q4_K_M"; any other
    name as it is.

    Raises:
        ValueError: the address is that of a file, of an old revision, or of something else; says what to give.
    """
    found = _HUB.fullmatch(model)
    if found is None:
        if "://" in model:
            raise ValueError(
                f"model {model!r} is an address: give a name that the Hugging Face hub has, such as Qwen/Qwen3-4B, or "
                "download it and give its directory or GGUF file"
            )
        return model
    organisation, name, *rest = [*re.split(r"[?#]", found[1])[0].strip("/").split("/"), ""][:4]
    if not name or organisation in ("datasets", "spaces", "models"):
        raise ValueError(f"model {model!r} is no model's address on the hub: give org/name, such as Qwen/Qwen3-4B")
    if rest not in ([], [""], ["tree", "main"]):
        tag = ":Q4_K_M, with the tag of the file that is meant" if "gguf" in model.lower() else ""
        raise ValueError(
            f"model {model!r} is the address of a part of a repository: give the repository, {organisation}/{name}{tag}"
        )
    return f"{organisation}/{name}"
