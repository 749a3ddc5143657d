"""Token routing (TREAD, arXiv 2501.04765): a random part of the tokens skips a window of transformer blocks.

`Route` and `TokenRouter` are what dit.py routes itself with; `attach` routes a network that is not ours with the same
router. Nothing here imports diffusers, peft or timm: networks are recognised by the names of their classes.
"""

from attach.adapters import Adapter, BlockList, Extent, TokenAxis
from attach.attachment import Attachment, RouteStatistics, attach, attached
from attach.presets import PRESETS, as_routes
from routing_module import Route, TokenRouter, importance_scores, num_kept_tokens

__all__ = [
    "PRESETS",
    "Adapter",
    "Attachment",
    "BlockList",
    "Extent",
    "Route",
    "RouteStatistics",
    "TokenAxis",
    "TokenRouter",
    "as_routes",
    "attach",
    "attached",
    "importance_scores",
    "num_kept_tokens",
]
