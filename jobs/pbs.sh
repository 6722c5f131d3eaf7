#!/bin/bash
# Two nodes under PBS Pro or OpenPBS with the MPICH wheel: qsub jobs/pbs.sh
# From the project's folder, after jobs/quickstart.sh has made .venv on a shared disk.
#PBS -N mpipar
# chunks: nodes, cores of each, and ranks on each
#PBS -l select=2:ncpus=16:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe
cd "$PBS_O_WORKDIR" || exit 2

# The run saves and stops two minutes before the walltime, and the next job goes on:
# give "--out" a name of your own, and submit this script again.
# PBS_NODEFILE has a line for each rank, which MPICH's mpiexec reads as it is.
.venv/bin/mpiexec -f "$PBS_NODEFILE" \
    .venv/bin/mpipar train small parallel.tensor=2 checkpoint.every=100 checkpoint.keep=2 \
    train.max_hours=0.95 --out runs/pbs --resume auto
