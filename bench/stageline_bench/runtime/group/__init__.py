"""A real group of processes on chosen cores, its workload, and a round."""
