"""Forward and backward of every layer on one rank's shard."""
