"""What was recorded, cut into updates."""
