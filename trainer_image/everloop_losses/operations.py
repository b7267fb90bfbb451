"""The closed set of operations that traced losses are made of, by the names that the SDK gives them.

What is left out, and why: random numbers and uninitialised memory (a loss is computed again after a loss of the
engine, and has to give the same), whatever writes elsewhere, and shapes that depend on values, but for masks.
"""

from __future__ import annotations


def _names(prefix: str, names: str) -> frozenset[str]:
    return frozenset(prefix + name for name in names.split())


_SHARED = """
    abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma
    floor ceil round trunc frac relu isfinite isinf isnan logical_not bitwise_not nan_to_num
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
    maximum minimum fmax fmin eq ne not_equal lt less le less_equal gt greater ge greater_equal
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    atan2 hypot xlogy logaddexp logaddexp2 lerp addcmul addcdiv copysign heaviside
    clamp clip clamp_min clamp_max where masked_fill
    sum nansum mean nanmean std var prod amax amin max min median argmax argmin all any logsumexp count_nonzero
    quantile cumsum cumprod cummax cummin logcumsumexp softmax log_softmax
    reshape flatten unsqueeze squeeze transpose t permute movedim flip roll tile broadcast_to
    narrow select index_select gather take_along_dim tril triu diag diagonal sort argsort topk
    chunk split unbind detach clone dot mv mm bmm matmul outer inner numel
"""
"""Both functions of torch and methods of its tensors."""

_TORCH = "cat concat concatenate stack hstack vstack zeros_like ones_like full_like rsub var_mean std_mean"
_FUNCTIONAL = """
    softmax log_softmax softmin relu relu6 leaky_relu elu celu selu silu mish hardtanh hardsigmoid hardswish tanh
    sigmoid softsign threshold l1_loss mse_loss smooth_l1_loss huber_loss kl_div nll_loss poisson_nll_loss
    cross_entropy binary_cross_entropy binary_cross_entropy_with_logits margin_ranking_loss
    normalize cosine_similarity pad
"""
_COMPILED = "gelu softplus log_sigmoid"
_OPERATOR = """
    add sub mul truediv floordiv mod pow matmul neg pos abs eq ne lt le gt ge and_ or_ xor invert getitem
    iadd isub imul itruediv
"""
_MATH = """
    sqrt exp expm1 log log1p log2 log10 pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh
    erf erfc lgamma floor ceil trunc fabs fmod copysign
"""

FUNCTIONS = frozenset(
    {"getattr"}
    | _names("torch.", _SHARED + _TORCH)
    | _names("torch.functional.", "norm split")
    | _names("torch.nn.functional.", _FUNCTIONAL)
    | _names("torch._C._nn.", _COMPILED)
    | _names("operator.", _OPERATOR)
    | _names("math.", _MATH)
)
"""Targets of `call_function`: qualified names."""

METHODS = _names(
    "",
    _SHARED
    + """
    norm contiguous expand expand_as view view_as reshape_as repeat new_zeros new_ones new_full
    float double half bfloat16 long int bool to type_as size dim ndimension nelement
    """,
)
"""Targets of `call_method`."""

ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT", "data", "values", "indices"})
"""What `getattr` may be asked for."""

DTYPES = frozenset(
    {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
    | {"float", "double", "half", "long", "int", "short"}
)
CONSTANTS = {
    "dtype": DTYPES,
    "device": frozenset({"cpu"}),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}
"""torch's own values that an argument may be, by kind."""

TEXT_OPTIONS = frozenset({"reduction", "rounding_mode", "mode", "approximate", "interpolation"})
"""Keyword arguments that are text. A text elsewhere could name a device."""
