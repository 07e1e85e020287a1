"""ZeRO-1/2 as sharding annotations."""
