"""Accelerate, timm's optimiser and timm's schedule from a recipe."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import nn

from lineardiff.recipes import TrainingRecipe


def build_accelerator(recipe: TrainingRecipe) -> Accelerator:
    """Build an Accelerator with the recipe's precision, compilation and accumulation.

    Raises:
        ValueError: The precision is fp16 without a GPU, or the batch does not divide evenly among the processes.
    """
    # Accelerate keeps the precision of the first Accelerator of a process; a second run may ask for another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Explicit, because under torchrun Accelerate joins processes on the CPU only if told so.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=recipe.precision,
        dynamo_backend="inductor" if recipe.compile else "no",
        # As a plugin, because `accelerate launch` sets a variable that overrides the plain argument.
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
    """Make the network recompute its activations in the backward pass, through timm's or diffusers' method.

    Raises:
        ValueError: The network supports neither.
    """
    for name, arguments in (("set_grad_checkpointing", (True,)), ("enable_gradient_checkpointing", ())):
        switch = getattr(network, name, None)
        if switch is not None:
            try:
                switch(*arguments)
            except (
                AssertionError,
                NotImplementedError,
                ValueError,
            ):  # how timm says that a model does not support it
                break
            return
    raise recipe.error("grad_checkpointing", f"{recipe.model} does not support it; leave it off")


def build_optimizer(recipe: TrainingRecipe, network: nn.Module) -> torch.optim.Optimizer:
    """Build timm's optimiser, with layer decay if the recipe asks for it.

    Norms, biases and the parameters named by the model's `no_weight_decay()` get no weight decay.

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
    """Build one cosine over all updates whose beginning is replaced by a linear warm-up, as in DeiT.

    It is stateless: after `step_update(step)` the learning rate is a function of `step`.

    Raises:
        ValueError: The warm-up is longer than the training.
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
