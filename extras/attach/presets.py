"""Routes by name, and as SimpleTuner's users write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from routing_module import Route

# `paper` is TREAD's own (section 4); the others are the settings that SimpleTuner's documentation recommends.
PRESETS = {
    "paper": (Route(0.5, 2, -4),),
    "balanced": (Route(0.5, 2, -2),),
    "fastest": (Route(0.7, 1, -1),),
    "high_resolution": (Route(0.6, 2, -3),),
    "lora": (Route(0.4, 3, -4),),
    "masked": (Route(0.7, 2, -2),),
}

_KEYS = tuple(field.name for field in fields(Route))


def as_routes(routes: str | Mapping | Sequence[Route | Mapping] | Route | None) -> tuple[Route, ...]:
    """Routes in any of the forms in which people have them.

    Args:
        routes: the name of a preset; a `tread_config` of SimpleTuner, `{"routes": [...]}` or, with its own name around it,
            `{"tread_config": {"routes": [...]}}`; a list of `Route` or of mappings with the keys selection_ratio,
            start_layer_idx, end_layer_idx; one `Route`.

    Returns:
        The routes, at least one, not yet checked against a network's depth (`TokenRouter` does that).

    Raises:
        ValueError: no routes, an unknown preset or key, a missing key.
    """
    if isinstance(routes, str):
        if routes not in PRESETS:
            raise ValueError(f"routes={routes!r} is no preset; choose one of {', '.join(PRESETS)}")
        return PRESETS[routes]
    if isinstance(routes, Route):
        return (routes,)
    if isinstance(routes, Mapping):
        if set(routes) == {"tread_config"} and isinstance(routes["tread_config"], Mapping):
            routes = routes["tread_config"]
        unknown = sorted(set(routes) - {"routes"})
        if unknown:
            raise ValueError(f"tread_config has the unknown key {unknown[0]!r}; it takes `routes`, a list")
        routes = routes.get("routes")
    if not routes or not isinstance(routes, Sequence) or isinstance(routes, str):
        raise ValueError(
            f"routes={routes!r} must be a list of {{{', '.join(_KEYS)}}}, or one of the presets {', '.join(PRESETS)}: "
            "token routing requires you to configure the routes"
        )
    return tuple(route if isinstance(route, Route) else _as_route(i, route) for i, route in enumerate(routes))


def _as_route(i: int, route: Mapping) -> Route:
    if not isinstance(route, Mapping):
        raise ValueError(f"routes[{i}]={route!r} must be a Route or a mapping with the keys {', '.join(_KEYS)}")
    for key in (*route, *_KEYS):
        if key not in _KEYS:
            raise ValueError(f"routes[{i}] has the unknown key {key!r}; it takes {', '.join(_KEYS)}")
        if key not in route:
            raise ValueError(f"routes[{i}] needs {key}; configure the routes with {', '.join(_KEYS)}")
    return Route(**route)
