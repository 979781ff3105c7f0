"""The steps between training and a node's reply, in one order: guard, update mods, compression, masks."""
