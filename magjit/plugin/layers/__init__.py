"""Layers that come again are traced once: AOTAutograd sees each as one operator.

AOTAutograd takes milliseconds for each operator of a program, forward and backward, and most
programs are the same layer many times.  `once` has AOTAutograd trace one of the layers alone,
and gives a graph in which each layer is one operator.  In the joint graph that comes of it,
`Layers.expand` puts the traced nodes in the place of these operators, before it is split into
forward and backward: what is compiled is what it would have been.
"""

from magjit.plugin.layers.tracing import Layers, once

__all__ = ["Layers", "once"]
