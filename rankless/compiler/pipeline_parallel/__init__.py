"""Pipeline parallelism: cut a captured program into stages, and run them on microbatches in a schedule.

With the model f = f_P(...f_1(x)) cut into P stages and the batch into M microbatches x_m, worker s computes f_s of
every x_m, and its gradients g_s(m). Loss and gradients are those of the whole batch: L = sum over m of L(x_m), where a
mean divides by the count of the whole batch, and g_s = sum over m of g_s(m). Values go to the next stage, their
gradients to the one before. With `gpipe`, P stages of equal work wait (P - 1) / (M + P - 1) of the time (Huang et al.,
"GPipe", 2019); `schedules` has the others and their sources.

`stages` cuts the program, by measured times if the plan asks. `microbatch_lowering` lowers it once per
microbatch. `node_phases` says when and where each node runs (Note [phases]), and `data_flow` what moves.
`step_builder` builds one worker's functions, and `step` runs them in the order of `schedules`, which also says which
workers take the microbatches of a stage in turns. `ArgumentExchange` gathers the arguments that the axis `expert`
shards. With workers of several kinds an extension cuts the stages. Decisions 0036 and 0052.
"""
