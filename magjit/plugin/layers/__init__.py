"""Layers that come again are traced once.

To trace an operator takes a millisecond, and with its gradient several; most programs are the same
layer many times.

For AOTAutograd (`once`), each layer is one operator, after it has traced one of them alone.  In
the joint graph that comes of it, `Layers.expand` puts the traced nodes in the place of these
operators, before it is split into forward and backward.  Without gradients
(`magjit.plugin.layers.recorded`), the recorded nodes of a layer are copied.  What is compiled is
what it would have been.
"""

from magjit.plugin.layers.tracing import Layers, once

__all__ = ["Layers", "once"]
