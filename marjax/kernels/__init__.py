"""Attention kernels: one reference, and faster implementations per backend."""
