"""Token routing (TREAD, arXiv 2501.04765) for networks of other libraries: `attach(network, routes)`.

Nothing here imports diffusers, peft or timm: `attach` recognises networks by the names of their classes.
"""

from extras.attach.adapters import Adapter, BlockList, ImageTokens, TokenAxis
from extras.attach.attachment import PRESETS, Attachment, as_routes, attach, attached

__all__ = ["PRESETS", "Adapter", "Attachment", "BlockList", "ImageTokens", "TokenAxis", "as_routes", "attach", "attached"]
