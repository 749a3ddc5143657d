"""Token routing (TREAD, arXiv 2501.04765) for networks from other libraries, with `attach(network, routes)`.

This package does not import diffusers or peft, because `attach` recognises networks by their class names.
"""

from extras.attach.adapters import Adapter, BlockList, ImageTokens, TokenAxis
from extras.attach.attachment import Attachment, attach, attached
from routing_module import Route

__all__ = ["Adapter", "Attachment", "BlockList", "ImageTokens", "Route", "TokenAxis", "attach", "attached"]
