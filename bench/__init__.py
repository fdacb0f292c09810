"""Us beside the peers, on the same work, in one run: each script prints ratios and the share of the physical limit."""
