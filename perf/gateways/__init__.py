"""Real gateways in front of three replicas, which are killed, drained and restarted under load."""
