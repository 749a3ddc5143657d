"""Routes by name, and as SimpleTuner's users write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routing_module import Route

# `paper` is TREAD's own (section 4); the others are the settings that SimpleTuner's documentation recommends.
PRESETS = {
    "paper": Route(0.5, 2, -4),
    "balanced": Route(0.5, 2, -2),
    "fastest": Route(0.7, 1, -1),
    "high_resolution": Route(0.6, 2, -3),
    "lora": Route(0.4, 3, -4),
    "masked": Route(0.7, 2, -2),
}


def as_routes(routes: str | Mapping | Sequence[Route | Mapping]) -> tuple[Route, ...]:
    """Routes in any of the forms in which people have them, not yet checked against a network's depth.

    Args:
        routes: the name of a preset; a `tread_config` of SimpleTuner, `{"routes": [...]}`, also inside
            `{"tread_config": ...}`; a list of `Route` or of mappings with the keys of `Route`.

    Raises:
        ValueError: an unknown preset, or no routes.
        KeyError, TypeError: a mapping without `routes`, or a route with a wrong or a missing key.
    """
    if isinstance(routes, str):
        if routes not in PRESETS:
            raise ValueError(f"routes={routes!r} is no preset; use {', '.join(PRESETS)}")
        return (PRESETS[routes],)
    if isinstance(routes, Mapping):
        routes = routes.get("tread_config", routes)["routes"]
    if not routes:
        raise ValueError(f"routes={routes!r} holds no route")
    return tuple(route if isinstance(route, Route) else Route(**route) for route in routes)
