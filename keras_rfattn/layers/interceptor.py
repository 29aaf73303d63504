"""The interface of objects that observe an attention layer or compute its output."""

import abc


class Interceptor(abc.ABC):
    """Observes a linear attention layer, or computes its output in its place.

    A layer looks for one in its `CallContext` first, and then in its attribute
    `recorder`. A plain function has the same effect as an interceptor that only
    defines `__call__`.
    """

    @abc.abstractmethod
    def __call__(self, call):
        """Returns the output of the layer's linear heads, or `None` to compute it.

        Args:
            call: The `layers.attend.Attention`, after projections and masks.

        Returns:
            Array of shape `(B, T, N, V)`. With `None`, the layer computes linear
            attention.
        """

    def around(self, layer, function, args, kwargs):
        """Calls the layer; a subclass may change its arguments and its output.

        Args:
            layer: The `LinearAttention`.
            function: The layer's own `__call__`.
            args: Tuple of the positional arguments of the call.
            kwargs: Dict of the keyword arguments of the call.

        Returns:
            The output of the layer.
        """
        return function(*args, **kwargs)
