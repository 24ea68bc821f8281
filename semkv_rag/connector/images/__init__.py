"""Images' features, what a model's projector makes of an image: stored, and loaded the next time."""
