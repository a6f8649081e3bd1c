"""From a recipe to Accelerate, timm's optimiser and timm's schedule."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import nn

from lineardiff.recipes import TrainingRecipe


def build_accelerator(recipe: TrainingRecipe) -> Accelerator:
    """Accelerate with the recipe's precision, compilation and accumulation, on the hardware it finds.

    Raises:
        ValueError: fp16 without a GPU, or a batch that does not divide among the processes.
    """
    # Accelerate keeps the precision of the first Accelerator of a process; a second run may ask for another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Said outright, because under torchrun Accelerate joins processes on the CPU only when it is.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=recipe.precision,
        dynamo_backend="inductor" if recipe.compile else "no",
        # As a plugin, because the plain argument gives way to a variable that `accelerate launch` sets.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=recipe.accumulate),
    )
    if recipe.precision == "fp16" and accelerator.device.type == "cpu":
        raise recipe.error("precision", "fp16 needs a GPU; on the CPU use bf16 or no")
    processes = accelerator.num_processes
    if recipe.batch_size % (recipe.accumulate * processes):
        raise recipe.error(
            "batch_size", f"expected a multiple of accumulate={recipe.accumulate} x {processes} processes"
        )
    return accelerator


def enable_grad_checkpointing(recipe: TrainingRecipe, network: nn.Module) -> None:
    """Has the network recompute its activations in the backward pass, through timm's or diffusers' method.

    Raises:
        ValueError: it has neither.
    """
    for name, arguments in (("set_grad_checkpointing", (True,)), ("enable_gradient_checkpointing", ())):
        switch = getattr(network, name, None)
        if switch is not None:
            switch(*arguments)
            return
    raise recipe.error("grad_checkpointing", f"{recipe.model} has no set_grad_checkpointing()")


def build_optimizer(recipe: TrainingRecipe, network: nn.Module) -> torch.optim.Optimizer:
    """timm's optimiser of that name: no decay of norms, biases and `no_weight_decay()`, layer decay if asked
    for.

    Raises:
        ValueError: timm has no optimiser of that name.
    """
    if recipe.optimizer not in list_optimizers():
        raise recipe.error("optimizer", f"expected one of {', '.join(list_optimizers())}")
    betas = {"betas": recipe.betas} if get_optimizer_info(recipe.optimizer).has_betas else {}
    return create_optimizer_v2(
        network,
        opt=recipe.optimizer,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **betas,
    )


def build_scheduler(
    recipe: TrainingRecipe, optimizer: torch.optim.Optimizer, *, steps_per_epoch: int
) -> CosineLRScheduler:
    """One cosine over all updates, its beginning replaced by a linear warm-up, as in DeiT; call
    `step_update(step)`.

    It has no state: the learning rate of the update after `step` updates is a function of `step`.

    Raises:
        ValueError: the warm-up is longer than the training.
    """
    total_steps = recipe.total_steps(steps_per_epoch)
    warmup_steps = round(recipe.warmup_epochs * steps_per_epoch)
    if warmup_steps >= total_steps:
        raise recipe.error(
            "warmup_epochs", f"that is {warmup_steps} updates; expected fewer than all {total_steps}"
        )
    lowest = recipe.min_learning_rate
    return CosineLRScheduler(
        optimizer,
        t_initial=total_steps,
        lr_min=recipe.learning_rate if lowest is None else lowest,
        warmup_t=warmup_steps,
        warmup_lr_init=recipe.warmup_learning_rate,
        t_in_epochs=False,
    )
