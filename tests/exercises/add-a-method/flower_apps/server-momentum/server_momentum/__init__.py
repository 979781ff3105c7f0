"""FedAvg with momentum at the server as a Flower App."""
