"""FedMUD as a Flower App."""
