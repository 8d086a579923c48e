import torch, time, sys

sys.path.insert(0, "src")
from shardwise.zero.host import host_buffer

d = torch.device("cuda")
n = 160 << 20
for kind in ("registered", "alloc"):
    a = [
        host_buffer(n, d) if kind == "registered" else torch.empty(n, dtype=torch.uint8, pin_memory=True)
        for _ in range(8)
    ]
    g = [torch.empty(n, dtype=torch.uint8, device=d) for _ in range(8)]
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()

    def go(h2d, d2h):
        torch.cuda.synchronize()
        t = time.perf_counter()
        for r in range(10):
            for i in range(4):
                if h2d:
                    with torch.cuda.stream(s1):
                        g[i].copy_(a[i], non_blocking=True)
                if d2h:
                    with torch.cuda.stream(s2):
                        a[4 + i].copy_(g[4 + i], non_blocking=True)
        torch.cuda.synchronize()
        return 40 * n / (time.perf_counter() - t) / 1e9

    go(1, 1)
    print(kind, "h2d", go(1, 0), "d2h", go(0, 1), "both (each)", go(1, 1), flush=True)
