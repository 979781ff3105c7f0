"""What passes between server and nodes: records, calls, seeds, the ledger of bits, the clock."""
