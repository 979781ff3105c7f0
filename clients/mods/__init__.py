"""What stands at a node between training and the reply, in one order: guard, update, compression, masks."""
