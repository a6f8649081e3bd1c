"""Which attention each stage of a hierarchical backbone uses: said in one way for PVT, Swin and CSwin."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from timm.layers import register_notrace_function

from lineardiff.layers import AttentionOptions, check_arms, has_option, say_ignored

Grid = tuple[int, int]

CONTRAST_GRIDS: tuple[Grid, ...] = ((3, 3), (4, 4), (7, 7), (7, 7))
"""Of the paper: 9, 16, 49 and 49 contrast tokens in the four stages."""


class StageAttention(NamedTuple):
    """The attention of all blocks of one stage.

    Attributes:
        arm: one of :data:`lineardiff.layers.Arm`, or the attention that the host comes with.
        contrast_grid: (h, w) cells that queries are pooled into; None where the arm pools none.
        options: further options of :class:`lineardiff.VisualContrastAttention`.
    """

    arm: str
    contrast_grid: Grid | None
    options: AttentionOptions

    def layer_options(self) -> dict[str, Any]:
        """As :func:`lineardiff.layers.create_attention` takes them."""
        grid = {} if self.contrast_grid is None else {"contrast_grid": self.contrast_grid}
        return {**grid, **self.options}


def stage_attentions(
    attention: str | Sequence[str],
    contrast_grids: Sequence[Grid | None] | None,
    *,
    own: str,
    stages: int,
    options: AttentionOptions,
) -> tuple[StageAttention, ...]:
    """Check what the caller said of each stage.

    Args:
        attention: one arm for all stages, or one for each.
        contrast_grids: (h, w) for each stage, None for a stage without contrast tokens; None altogether
            takes the paper's.
        own: name of the host's own attention, allowed beside the arms.
        stages: how many there are.
        options: of :class:`lineardiff.VisualContrastAttention`, for all stages.

    Raises:
        ValueError: an arm is unknown, or a contrast grid is missing or no pair of positive integers.
        TypeError: an option is unknown.
    """
    unknown = options.keys() - AttentionOptions.__annotations__
    if unknown:
        raise TypeError(
            f"unexpected argument {', '.join(sorted(unknown))}; see the arguments of the model, and of its attention "
            f"layers: {', '.join(AttentionOptions.__annotations__)}."
        )
    arms = check_arms(attention, stages, own=own, of="stages")
    pooling = [arm != own and has_option(arm, "contrast_grid") for arm in arms]
    if contrast_grids is None:
        grids: Sequence[Any] = [
            CONTRAST_GRIDS[min(index, len(CONTRAST_GRIDS) - 1)] if pools else None
            for index, pools in enumerate(pooling)
        ]
    else:
        grids = contrast_grids
    if not isinstance(grids, (tuple, list)) or len(grids) != stages:
        raise ValueError(
            f"contrast_grids={contrast_grids!r} must hold one (h, w), or None, for each of the {stages} stages, "
            f"such as {CONTRAST_GRIDS}."
        )
    for index, (arm, grid, pools) in enumerate(zip(arms, grids, pooling, strict=True)):
        if (pools or grid is not None) and not is_pair(grid):
            needs = f"its attention {arm!r} needs " if pools else ""
            raise ValueError(
                f"contrast_grids of stage {index + 1} is {grid!r}; {needs}two positive integers (rows, columns), "
                f"such as {CONTRAST_GRIDS[min(index, 3)]}."
            )
        if arm == own:
            for name in (*options, *(("contrast_grid",) if grid is not None else ())):
                say_ignored(arm, name)
    return tuple(
        StageAttention(arm, (grid[0], grid[1]) if grid is not None else None, options)
        for arm, grid in zip(arms, grids, strict=True)
    )


class Geometry(NamedTuple):
    """How a backbone divides images, and what its stages need of the grids.

    Attributes:
        patch_sizes: side of the patches that each stage merges, (4, 2, 2, 2) say.
        pads: whether the later stages take grids that do not divide (then they round up); if not, every stage
            must divide.
        contrast_grids: of each stage that pools, else None.
    """

    patch_sizes: tuple[int, ...]
    pads: bool
    contrast_grids: tuple[Grid | None, ...]

    def grids(self, image_size: Grid) -> list[Grid]:
        """(H, W) of each stage for images of this size, rounded up."""
        grids, (H, W) = [], image_size
        for patch in self.patch_sizes:
            H, W = -(-H // patch), -(-W // patch)
            grids.append((H, W))
        return grids

    def first(self, stages: int) -> "Geometry":
        """Of the first so many stages."""
        return Geometry(self.patch_sizes[:stages], self.pads, self.contrast_grids[:stages])


def image_grid(img_size: object) -> Grid:
    """(height, width) of an `img_size` argument: pixels of a side, or a pair.

    Raises:
        ValueError: it is neither.
    """
    pair: Any = (img_size, img_size) if isinstance(img_size, int) else img_size
    if not is_pair(pair):
        raise ValueError(
            f"img_size={img_size!r} must be the pixels of a side, such as 224, or (height, width)."
        )
    return pair[0], pair[1]


def is_pair(value: object) -> bool:
    """Whether a value is two positive integers."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(i, int) and not isinstance(i, bool) and i > 0 for i in value)
    )


def check_depths(**per_stage: Sequence[object]) -> None:
    """Check that settings of stages are of equally many stages.

    Raises:
        ValueError: they are not; the message gives all lengths.
    """
    lengths = {name: len(values) for name, values in per_stage.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"each stage needs its own setting; got {lengths}. Give all of them for as many stages."
        )


def geometry(patch_sizes: tuple[int, ...], attentions: Sequence[StageAttention], *, pads: bool) -> Geometry:
    """The geometry of a backbone with these attentions."""
    pooled = (
        a.contrast_grid if has_option(a.arm, "contrast_grid") else None
        for a in attentions[: len(patch_sizes)]
    )
    return Geometry(patch_sizes, pads, tuple(pooled))


@register_notrace_function  # its checks are no graph
def check_image(height: int, width: int, geometry: Geometry) -> None:
    """Check that images of this size go through every stage.

    Raises:
        ValueError: a stage cannot divide them into patches, or pools into more cells than it sees; the message
            names the stage and what to do.
    """
    multiple = 1
    for patch in geometry.patch_sizes[: 1 if geometry.pads else None]:
        multiple *= patch
    if height % multiple or width % multiple:
        stage, side = 0, 1
        while not (
            height % (side * geometry.patch_sizes[stage]) or width % (side * geometry.patch_sizes[stage])
        ):
            side *= geometry.patch_sizes[stage]
            stage += 1
        raise ValueError(
            f"images of {height} x {width} pixels give stage {stage + 1} a map of {height // side} x {width // side}, "
            f"which does not divide into its patches of {geometry.patch_sizes[stage]} x {geometry.patch_sizes[stage]}; "
            f"resize or pad the images to multiples of {multiple}, such as "
            f"{_up(height, multiple)} x {_up(width, multiple)}."
        )
    grids = geometry.grids((height, width))
    for index, ((H, W), pooled) in enumerate(zip(grids, geometry.contrast_grids, strict=True)):
        if pooled is not None and (H < pooled[0] or W < pooled[1]):
            fitting = tuple(
                None if p is None else (min(p[0], grid[0]), min(p[1], grid[1]))
                for p, grid in zip(geometry.contrast_grids, grids, strict=True)
            )
            raise ValueError(
                f"stage {index + 1} pools into a {pooled[0]} x {pooled[1]} contrast grid, but of images of "
                f"{height} x {width} pixels it sees only {H} x {W} tokens; use larger images, or build the model "
                f"with contrast_grids={fitting}."
            )


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
