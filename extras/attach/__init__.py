"""Token routing (TREAD, arXiv 2501.04765) for networks of other libraries: `attach(network, routes)`.

Nothing here imports diffusers or peft: `attach` recognises networks by the names of their classes.
"""

from extras.attach.adapters import Adapter, BlockList, ImageTokens, TokenAxis
from extras.attach.attachment import Attachment, attach, attached
from routing_module import Route

__all__ = ["Adapter", "Attachment", "BlockList", "ImageTokens", "Route", "TokenAxis", "attach", "attached"]
