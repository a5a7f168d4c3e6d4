"""Pipeline parallelism: cut a captured program into stages, and run them on microbatches in a schedule.

`stages` cuts the program, by the times of `measured_work` if the plan asks. `microbatches` lowers it once per
microbatch. `partition` says when and where each node runs (Note [phases]), and `data_flow` what moves. `step_builder`
builds one worker's functions, and `step` runs them in the order of `schedules`. `stage_gathers` gathers the parameters
that a stage holds sharded, and `argument_exchange` the arguments that the axis `expert` shards. With workers
of several kinds an extension cuts the stages, and `stage_workers` says which workers take the microbatches of a stage
in turns. Decisions 0036 and 0052.
"""
