"""How fast it is: against other libraries, and where the time of a step goes.

Nothing is imported here: a worker in a Python without mpipar's own dependencies takes
turns.py, work.py and the modules of its library alone.
"""
