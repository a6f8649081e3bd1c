"""Everything that is diffusers': the pipeline, its schedulers, the autoencoder, and folders of samples."""
