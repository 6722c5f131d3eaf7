"""How fast it is: against other libraries, and where the time of a step goes.

Nothing is imported here: a worker in a Python without mpipar's own dependencies takes
turns.py and the torch modules alone.
"""
