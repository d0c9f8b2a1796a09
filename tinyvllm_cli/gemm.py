"""Which kernel multiplies what: the rules of `ops.linear` and its like, by what was measured.

All times are of bf16 on an H200.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Which kernel multiplies how many rows, from the microseconds that all GEMMs, norms and SwiGLU of a Llama-3.2-1B step
# take (with `matvec`, a whole step of 8 rows takes 844):
#   rows              16   32   64   96  128
#   linear_hopper    734  752  828  911  958  (128: with pairs of CTAs for `down` as well, alone 2.2 a layer slower)
#   cuBLAS           917  943  981 1004 1071
# At 128 rows these and `sample` at temperature 0 take 982, with argmax_linear_hopper in the place of the last two 937.
MATVEC_MAX_ROWS = 8
"""Up to so many rows `linear` streams the weights by the `matvec` kernel."""
HOPPER_MAX_ROWS = 128
"""Up to so many it takes `linear_hopper` on compute capability 9.0; above, `linear_wide` or cuBLAS."""

# The microseconds of gate and up of that model with SwiGLU, and of 8B's, at the share of wanted work (`wide_use`):
#   rows                129   160   192   224   256   257   320   384   448   512   640  2048  8192  |  8B: 256  8192
#   share               .78   .97   .97   .97   .97   .78   .97   .97   .97   .97   .81   .97   .97  |      .85   .99
#   gated_linear_wide  21.3  20.6  21.8  23.6  25.5  35.5  31.8  36.7  41.4  46.6  66.5 175.1 690.0  |    105.1  2864
#   cuBLAS, silu_mul   24.6  25.2  27.2  28.4  29.9  30.7  35.6  41.7  50.8  52.8  66.2 203.5 805.7  |    113.1  2994
WIDE_MIN_USE = 0.8
"""From this share on `gated_linear` takes `gated_linear_wide` for more than HOPPER_MAX_ROWS rows."""

# The microseconds of its `down` with the sum added to the residual (each form of add_linear_wide timed by itself),
# and of logits: with the choice of tokens at temperature 0, and without by cuBLAS (at 256 rows `sample` takes 42):
#   rows                          129   160   192   224   256
#   add_linear_wide              16.6  16.2  18.0  19.0  19.0
#   cuBLAS                       17.6  17.3  23.0  25.4  20.9
#   argmax_linear_hopper          149   137   154   181   185
#   cuBLAS                        159   166   180   191   207
FEW_MAX_ROWS = 256
"""Up to so many rows tokens are chosen by `argmax_linear_hopper`, and `add_linear_norm` may take `add_linear_wide`."""
# A layer of a decode step of that model at contexts of 10 to 290 tokens, by what multiplies qkv and o: alone cuBLAS
# takes as long, but the kernels before and after it then wait for each other.
#   rows                          160   192   224   256
#   linear_wide                  73.7  80.9  86.5  91.8
#   cuBLAS                       76.8  83.6  89.8  95.1
SPLIT_MIN_SIZE = 8192
"""From so many in features on the CTAs of `add_linear_wide` split them."""

# The microseconds that the GEMMs of the 16 layers, norms and SwiGLU take, by who does the norms (`norms_can_wait`):
#   rows              16   32   64   96  128  160  192  224  256
#   their products   599  613  663  716  769  936  939 1021 1042
#   rms_norm         623  636  687  751  804  986  975 1057 1080


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def suits_hopper(x: Tensor) -> bool:
    """Whether x [T, in] is multiplied by `linear_hopper` and `gated_linear_hopper`."""
    return MATVEC_MAX_ROWS < x.size(0) <= HOPPER_MAX_ROWS and _is_hopper(x.device)


def suits_argmax(x: Tensor) -> bool:
    """Whether tokens at temperature 0 are chosen from x [S, in] by `argmax_linear_hopper`."""
    return MATVEC_MAX_ROWS < x.size(0) <= FEW_MAX_ROWS and x.size(1) % 8 == 0 and _is_hopper(x.device)


def _fits_wide(x: Tensor, weight: Tensor, num_features: int, num_sms: int) -> bool:
    """Whether x has some hundred rows, and so many SMs for each so many features of weight [N, in] are there."""
    features, size = weight.shape
    if not HOPPER_MAX_ROWS < x.size(0) <= FEW_MAX_ROWS or size % 8 or features % 8:
        return False
    return _is_hopper(x.device) and -(-features // num_features) * num_sms <= _num_sms(x.device)


def suits_linear_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether x [T, in] and weight [N, in] are multiplied by `linear_wide`: two SMs take 128 tokens by 96 features."""
    return weight.size(1) < SPLIT_MIN_SIZE and _fits_wide(x, weight, 96, 4)


def suits_add_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether x [T, in] and weight [H, in] are multiplied by `add_linear_wide`: up to 8 SMs take 128 features."""
    return suits_linear_wide(x, weight) if weight.size(1) < SPLIT_MIN_SIZE else _fits_wide(x, weight, 128, 8)


def norms_can_wait(x: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether the products of a layer of x [T, H] do the norms between them, see `ops.RowScale`.

    Not in fp16, where the residual times a norm's weights may be too large.
    """
    if x.dtype != torch.bfloat16:
        return False
    if suits_hopper(x):
        return o.size(0) % 8 == 0
    adds = suits_add_wide(x, o) and suits_add_wide(x, down)
    return adds and suits_linear_wide(x, qkv) and suits_wide(x, gate_up)


def wide_use(rows: int, features: int, num_sms: int) -> float:
    """The wanted share of what `gated_linear_wide` computes.

    In a round, each two SMs take 256 rows by 128 features, or 160, 192 or 224 rows if there are no more than 512.
    """
    pairs = num_sms // 2

    def computed(rows_at_once: int) -> int:
        tiles = -(-rows // rows_at_once) * -(-features // 128)
        return -(-tiles // pairs) * pairs * rows_at_once * 128

    return rows * features / min(map(computed, (160, 192, 224, 256) if rows <= 512 else (256,)))


def suits_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether x [T, in] and weight [2I, in] are multiplied by `gated_linear_wide`."""
    rows, features = x.size(0), weight.size(0) // 2
    if rows <= HOPPER_MAX_ROWS or features % 8 or x.size(1) % 8 or not _is_hopper(x.device):
        return False
    return wide_use(rows, features, _num_sms(x.device)) >= WIDE_MIN_USE
