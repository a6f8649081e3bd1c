"""Everything built on diffusers: the pipeline, schedulers, autoencoders and folders of samples."""

__all__: list[str] = []  # import from the modules: diffusers takes seconds to load
