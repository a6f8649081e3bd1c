"""Visual-Contrast Attention as a layer: a drop-in replacement for the self-attention of vision transformers."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lineardiff.checks import check_heads, check_integer, check_pair
from lineardiff.layers.parts import ValueConv, resize_contrast_embed
from lineardiff.ops import Inputs, Softmax, Stage, attend, pool_grid, reference
from lineardiff.ops.inputs import check_options, with_tokens

__all__ = ["Pool", "Tokens", "VisualContrastAttention"]

Tokens = Literal["pool+embed", "embed", "pool"]
Pool = Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor]


class StageNorm(nn.RMSNorm):
    """Gain of an RMSNorm that the op computes together with its attention."""

    def forward(self) -> Tensor:  # type: ignore[override]
        """Return the gain. Calling the module, rather than reading the parameter, runs hooks that move weights."""
        # a traced graph must not depend on whether gradients were enabled
        keep = torch.is_grad_enabled() or torch.jit.is_tracing()
        weight = self.weight if keep else self.weight.detach()
        return weight.view_as(weight)


@register_notrace_module  # torch.fx cannot trace the checks of sizes; torch.export and torch.compile can
class VisualContrastAttention(nn.Module):
    """Visual-Contrast Attention (https://arxiv.org/abs/2511.00833), linear in the number of tokens.

    Parameters are named as in timm's `Attention` where they mean the same (`qkv`, `proj`), so pretrained weights
    load. `pos_embed_pos` and `pos_embed_neg` (n, dim) are the contrast embeddings e+ and e-, `lambda1_*` and
    `lambda2_*` (head_dim) the vectors of l1 and l2, `norm1` and `norm2` the RMSNorms of the global contrast and of the
    patch-wise attention, and `conv` the depth-wise convolution.

    Args:
        dim: Number of channels C.
        num_heads: Number of heads; must divide `dim`.
        contrast_grid: Cells (h, w) that the queries are pooled into, giving n = h w contrast tokens.
        grid_size: Grid (H, W) of the tokens if it is fixed. Default: taken from each call.
        depth: Index of the block from 0; sets l_init = 0.8 - 0.6 exp(-0.3 depth).
        qkv_bias: Whether the projection of q, k and v has a bias.
        proj_bias: Whether the output projection has a bias.
        proj_drop: Dropout after the output projection.
        conv: Add a depth-wise 3x3 convolution of V on the grid.
        tokens: Source of the contrast tokens: "pool+embed" (the paper), "embed" (learned, the same for every
            image) or "pool" (both streams are the pooled queries).
        global_contrast: Global contrast: "differential" (the paper), "plain" (one stream, no lambda, no norm) or
            "halves" (the language form of differential attention).
        patchwise: Patch-wise attention, with the same choices.
        softmax: Softmax of the patch-wise attention: "separate" (the paper's two) or "joint" (one over the 2n tokens).
        pool: Pooling of the queries: "avg", or a function like :func:`lineardiff.ops.pool_grid`,
            (B, H*W, C), (H, W), (h, w) -> (B, h*w, C).
        device: Device of the parameters.
        dtype: Type of the parameters.

    Shape:
        - Input: (B, P + H*W, C), where the P prefix tokens (class token, registers) come first.
        - Output: (B, P + H*W, C).

    Raises:
        ValueError: An option does not fit.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        contrast_grid: tuple[int, int] = (7, 7),
        grid_size: tuple[int, int] | None = None,
        depth: int = 0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        conv: bool = True,
        tokens: Tokens = "pool+embed",
        global_contrast: Stage = "differential",
        patchwise: Stage = "differential",
        softmax: Softmax = "separate",
        pool: Literal["avg"] | Pool = "avg",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        check_integer("depth", depth, minimum=0)
        check_pair("contrast_grid", contrast_grid)
        if grid_size is not None:
            check_pair("grid_size", grid_size)
        if tokens not in get_args(Tokens):
            raise ValueError(f"tokens={tokens!r} is unknown; choose one of {get_args(Tokens)}.")
        check_options(softmax=softmax, global_contrast=global_contrast, patchwise=patchwise)
        if not (pool == "avg" or callable(pool)):
            raise ValueError(
                f"pool={pool!r} is unknown; pass 'avg' or a function (x, feat_size, contrast_grid)."
            )
        head_dim = dim // num_heads
        if "halves" in (global_contrast, patchwise) and head_dim % 2:
            raise ValueError(f"'halves' needs an even head dimension; dim / num_heads is {head_dim}.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.contrast_grid: tuple[int, int] = (contrast_grid[0], contrast_grid[1])
        self.grid_size: tuple[int, int] | None = None if grid_size is None else (grid_size[0], grid_size[1])
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.tokens: str = tokens
        self.global_contrast: str = global_contrast
        self.patchwise: str = patchwise
        self.softmax: str = softmax
        self.pool = pool_grid if pool == "avg" else pool

        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        n = self.contrast_grid[0] * self.contrast_grid[1]
        embed, contrast = "embed" in tokens, "differential" in (global_contrast, patchwise)
        self.pos_embed_pos = nn.Parameter(torch.empty(n, dim, **factory)) if embed else None
        self.pos_embed_neg = nn.Parameter(torch.empty(n, dim, **factory)) if embed and contrast else None

        def vector(form: str) -> nn.Parameter | None:
            return None if form == "plain" else nn.Parameter(torch.empty(head_dim, **factory))

        self.lambda1_q1, self.lambda1_k1, self.lambda1_q2, self.lambda1_k2 = (
            vector(global_contrast) for _ in range(4)
        )
        self.lambda2_q1, self.lambda2_k1, self.lambda2_q2, self.lambda2_k2 = (
            vector(patchwise) for _ in range(4)
        )
        self.norm1 = None if global_contrast == "plain" else StageNorm(head_dim, eps=1e-5, **factory)
        self.norm2 = None if patchwise == "plain" else StageNorm(head_dim, eps=1e-5, **factory)
        self.conv = ValueConv(dim, **factory) if conv else None
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the layer's direct parameters: e+ and e- from N(0, 1), the lambda vectors from N(0, 0.1).

        As in torch and timm, the submodules (qkv, conv, norms, proj) each reset themselves.
        """
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.normal_(parameter, std=0.1 if name.startswith("lambda") else 1.0)

    def forward(self, x: Tensor, feat_size: tuple[int, int] | None = None) -> Tensor:
        """Apply the attention.

        Args:
            x: Tokens (B, P + H*W, C): P prefix tokens, then the grid row by row. P is derived from the grid.
            feat_size: Grid (H, W) of the tokens. Default: `grid_size`.

        Returns:
            (B, P + H*W, C).

        Raises:
            ValueError: No grid is known, it does not fit the tokens, or it is smaller than the contrast grid.
        """
        B, N, C = x.shape
        H, W = self._feat_size(N, feat_size)
        inputs = self._inputs(x, (H, W))
        o = attend(inputs)
        if self.conv is not None:
            o = self.conv(o, inputs.v, (H, W))
        return self.proj_drop(self.proj(o.transpose(1, 2).reshape(B, N, C)))

    @torch.jit.ignore
    @torch.no_grad()
    def attention_maps(self, x: Tensor, feat_size: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the maps for figures, computed by the reference backend without gradients.

        Args:
            x: Tokens (B, P + H*W, C).
            feat_size: Grid (H, W) of the tokens. Default: `grid_size`.

        Returns:
            The contrast map v^ (B, heads, n, head_dim) of the global contrast, and the signed attention A
            (B, heads, P + H*W, n) of the patch-wise attention.

        Raises:
            ValueError: As for :meth:`forward`.
        """
        inputs = with_tokens(self._inputs(x, self._feat_size(x.shape[1], feat_size)))
        return reference.contrast_map(inputs), reference.attention_map(inputs)

    @torch.jit.ignore
    def set_contrast_grid(self, contrast_grid: tuple[int, int]) -> None:
        """Change the contrast grid and resize the contrast embeddings, as timm resizes position embeddings.

        Raises:
            ValueError: `contrast_grid` is not two positive integers.
        """
        check_pair("contrast_grid", contrast_grid)
        new_grid = (contrast_grid[0], contrast_grid[1])
        for name in ("pos_embed_pos", "pos_embed_neg"):
            embed = getattr(self, name)
            if embed is not None:
                resized = resize_contrast_embed(
                    embed.detach(), new_grid=new_grid, old_grid=self.contrast_grid
                )
                setattr(self, name, nn.Parameter(resized.clone(), requires_grad=embed.requires_grad))
        self.contrast_grid = new_grid

    def _feat_size(self, N: int, feat_size: tuple[int, int] | None) -> tuple[int, int]:
        if feat_size is None:
            feat_size = self.grid_size
        if feat_size is None:
            raise ValueError(
                "The grid of the tokens is unknown; call with feat_size=(H, W), "
                "or build the layer with grid_size=(H, W)."
            )
        H, W = feat_size
        h, w = self.contrast_grid
        if H < h or W < w:
            raise ValueError(
                f"The grid {H} x {W} is smaller than the contrast grid {h} x {w}; "
                "use a larger image or a smaller contrast_grid."
            )
        if N < H * W:
            raise ValueError(
                f"x has {N} tokens, fewer than the {H} x {W} grid of feat_size; pass the grid of these tokens."
            )
        return H, W

    def _inputs(self, x: Tensor, feat_size: tuple[int, int]) -> Inputs:
        """Project x, form the contrast tokens and return all inputs of the op."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.dim).unbind(2)
        pos, neg, pool = self._contrast_tokens(q, feat_size)
        l1 = self._lambda(self.lambda1_q1, self.lambda1_k1, self.lambda1_q2, self.lambda1_k2)
        l2 = self._lambda(self.lambda2_q1, self.lambda2_k1, self.lambda2_q2, self.lambda2_k2)
        gain1 = self.norm1() if self.norm1 is not None else None
        gain2 = self.norm2() if self.norm2 is not None else None
        return Inputs(
            self._split_heads(q),
            self._split_heads(k),
            self._split_heads(v),
            self._split_heads(pos),
            self._split_heads(neg) if neg is not None else None,
            (l1, l2),
            (gain1, gain2),
            (self.lambda_init, self.lambda_init),
            self.softmax,
            self.global_contrast,
            self.patchwise,
            1e-5,
            pool,
        )

    def _contrast_tokens(
        self, q: Tensor, feat_size: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None, tuple[int, int, int, int] | None]:
        """Return t+ = t~ + e+ and t- = t~ + e-, (B, n, C), or e+, e- and the pooling left to the op."""
        B, N, _ = q.shape
        e_pos, e_neg = self.pos_embed_pos, self.pos_embed_neg
        H, W = feat_size
        h, w = self.contrast_grid
        if self.tokens == "embed":
            assert e_pos is not None
            pos = e_pos.to(q.dtype).expand(B, -1, -1)
            return pos, e_neg.to(q.dtype).expand(B, -1, -1) if e_neg is not None else None, None
        grid = q[:, N - H * W :]
        if torch.jit.is_scripting():
            pooled = pool_grid(grid, feat_size, self.contrast_grid)
        elif self.pool is pool_grid and e_pos is not None:
            neg = e_neg.expand(B, -1, -1) if e_neg is not None else None
            return e_pos.expand(B, -1, -1), neg, (H, W, h, w)
        else:
            pooled = self.pool(grid, feat_size, self.contrast_grid)
        if e_pos is None:
            has_neg = self.global_contrast == "differential" or self.patchwise == "differential"
            return pooled, pooled if has_neg else None, None
        pos = (pooled + e_pos).to(q.dtype)
        return pos, (pooled + e_neg).to(q.dtype) if e_neg is not None else None, None

    def _lambda(
        self,
        q1: Tensor | None,
        k1: Tensor | None,
        q2: Tensor | None,
        k2: Tensor | None,
    ) -> Tensor | None:
        """Return l = exp(lq1 . lk1) - exp(lq2 . lk2) + l_init in at least float32, or None if plain."""
        if q1 is None or k1 is None or q2 is None or k2 is None:
            return None
        dtype = torch.promote_types(q1.dtype, torch.float32)
        q1, k1, q2, k2 = q1.to(dtype), k1.to(dtype), q2.to(dtype), k2.to(dtype)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_init

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, rows, C) -> (B, heads, rows, head_dim)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, contrast_grid={self.contrast_grid}, "
            f"grid_size={self.grid_size}, tokens={self.tokens!r}, global_contrast={self.global_contrast!r}, "
            f"patchwise={self.patchwise!r}, softmax={self.softmax!r}"
        )
