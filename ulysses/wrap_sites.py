"""Where a module attends: each such part by name, and the route by which it can be taken over."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from ulysses.wrap_code import calls_in, names_in
from ulysses.wrap_mixers import is_named
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Site

SDPA = "sdpa"  # reaches torch's scaled_dot_product_attention
MULTIHEAD = "nn.MultiheadAttention"
TRANSFORMERS = "transformers"  # calls through transformers' attention interface
DIFFUSERS = "diffusers"  # calls through diffusers' attention dispatch
FUNCTION = "function"  # holds a callable that `ulysses.wrap_function` has wrapped

_BY_NAME = {
    "ALL_ATTENTION_FUNCTIONS": TRANSFORMERS,
    "dispatch_attention_fn": DIFFUSERS,
    "scaled_dot_product_attention": SDPA,
}
_LOOKS_LIKE = re.compile(r"attention|attn", re.IGNORECASE)


def find_sites(
    module: nn.Module, replicated: Collection[str | type], local: Collection[str | type]
) -> dict[str, Site]:
    """Every part of a module that attends, by name.

    Raises ValueError if there is none, or one whose attention can not be reached.
    """
    found = {}
    for name, part in module.named_modules():
        if route := route_of(part):
            policy = Policy.EXCHANGED
            if is_named(name, part, local):
                policy = Policy.LOCAL
            elif is_named(name, part, replicated):
                policy = Policy.REPLICATED
            found[name] = Site(name or "the module itself", type(part).__name__, route, policy)
    _require_all_reached(module, found, local)
    return found


def route_of(module: nn.Module) -> str | None:
    """How a module's own forward attends, if it does."""
    if type(module).forward is nn.MultiheadAttention.forward:
        return MULTIHEAD
    if any(hasattr(value, "ulysses_function") for value in vars(module).values()):
        return FUNCTION
    names = names_in(type(module))
    for name, route in _BY_NAME.items():
        if name in names:
            return route
    for attribute in vars(module).values():
        if callable(attribute) and not isinstance(attribute, (nn.Module, type)):
            if getattr(attribute, "__name__", "") == "scaled_dot_product_attention":
                return SDPA
            called = calls_in(attribute)
            for name in ("dispatch_attention_fn", "scaled_dot_product_attention"):
                if name in called:
                    return _BY_NAME[name]
    return None


def _require_all_reached(
    module: nn.Module, found: dict[str, Site], local: Collection[str | type]
) -> None:
    """Refuses a module with no site, or with a part that looks like attention and has none."""
    way_out = (
        "Attention is recognised in nn.MultiheadAttention, in code that calls torch's "
        "scaled_dot_product_attention, transformers' attention interface or diffusers' attention "
        "dispatch, and in functions that "
        "ulysses.wrap_function has wrapped: make it one of these, or name the part in "
        "local=[...] if it does not attend along the sharded sequence"
    )
    unreached = [
        f"{name or 'the module itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if _LOOKS_LIKE.search(type(part).__name__)
        and not _has_site(name, found)
        and not is_named(name, part, local)
    ]
    if unreached:
        raise ValueError(f"no route to the attention of {', '.join(unreached)}. {way_out}")
    if not found:
        kinds = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"no attention found in {type(module).__name__}, whose parts are {', '.join(kinds)}; "
            f"wrapped, it would silently run on this rank's shard alone. {way_out}"
        )


def _has_site(name: str, found: dict[str, Site]) -> bool:
    """Whether a part is a site, holds one, or belongs to one."""
    prefix = f"{name}." if name else ""
    return any(
        site == name or site.startswith(prefix) or name.startswith(f"{site}." if site else "")
        for site in found
    )


def declared_heads(module: nn.Module) -> tuple[int | None, int | None]:
    """(query heads, key/value heads) by a module's own attributes or configuration."""
    config = getattr(module, "config", None)
    num_heads = _first(module, ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads"))
    num_heads = num_heads or _first(config, ("num_attention_heads",))
    num_kv_heads = _first(module, ("num_key_value_heads", "num_kv_heads", "n_kv_heads"))
    num_kv_heads = num_kv_heads or _first(config, ("num_key_value_heads",))
    return num_heads, num_kv_heads or num_heads


def _first(holder: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
