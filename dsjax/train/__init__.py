"""Training: state, losses, optimizers, the step, the loop, the trainer and the verbs on top."""
