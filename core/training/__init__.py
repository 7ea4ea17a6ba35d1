"""Models on torch: bringing one into place, turning text into ids and back, log-probs, losses, updates."""
