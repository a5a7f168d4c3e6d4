import torch, torch.distributed as dist
from collectives.backends.hosts.host_groups import hosts_group
from collectives.backends.operations import *
from support.processes import on_mesh
def run(mesh, hosts):
    with hosts_group(mesh, hosts) as group:
        assert type(group).__name__=="HierarchicalProcessGroup", type(group)
        count=10; x=torch.ones(10)*mesh.rank
        dist.all_reduce(x,group=group)
        print(x)
        for kind in STARTS:
            for shape in [(5,),(),(0,),(3,0),(70000,7)]:
                for lay in LAYOUTS:
                    for reduction,dtype in [("sum","int64"),("avg","float64"),("band","bool"),("sum","complex64"),("max","bfloat16")]:
                        op=Operation(kind=kind,dtype=dtype,shape=shape,reduction=reduction,layout=lay,root=1,is_uneven=True,is_asynchronous=True,waits_for_all=True,seed=4,tag=(count:=count+1))
                        try:
                            start(op,group,mesh.rank,mesh.size,lay).finish()
                        except Exception as e:
                            raise RuntimeError(f"{op}") from e
import pytest
@pytest.mark.parametrize("hosts",["aab","aabb","aaab","abab","abb","aabc"])
def test_it(hosts):
    on_mesh(len(hosts),run,hosts)
