"""Attention algorithms over features: functions of arrays, without state or layers.

The docstrings of this folder use these shape letters:

- B batch size, T number of queries, S number of keys
- N query heads, K key/value heads, G = N // K query heads per key head; query head n
  reads key/value head ``n // G``
- H head dim, V value dim, M feature width, C block length, n blocks
- R = T · G query rows of one key head: the G query heads of a token are adjacent rows

Public functions take arrays of shape ``(B, T, N, H)``. Every algorithm takes
``(query_features, key_features, value, key_mask=None)`` and gives the output and the
gradient of `quadratic`.
"""

from keras_rfattn.ops.bidirectional import bidirectional
from keras_rfattn.ops.causal import causal
from keras_rfattn.ops.features import Features
from keras_rfattn.ops.kernel_attention import Polynomial, Softmax
from keras_rfattn.ops.masks import AttentionMask, interpret_mask
from keras_rfattn.ops.options import Options
from keras_rfattn.ops.quadratic import quadratic
from keras_rfattn.ops.state import State, extend_state, init_state, read_state

__all__ = [
    "AttentionMask",
    "Features",
    "Options",
    "Polynomial",
    "Softmax",
    "State",
    "bidirectional",
    "causal",
    "extend_state",
    "init_state",
    "interpret_mask",
    "quadratic",
    "read_state",
]
