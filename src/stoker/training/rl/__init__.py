"""Learning from rewards: rollouts, advantages, the clipped loss, the breaker."""
