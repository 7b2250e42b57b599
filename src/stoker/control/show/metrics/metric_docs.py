"""docs/metrics.md, made from the table itself:   python -m stoker.control.show.metrics.metric_docs > docs/metrics.md"""

from __future__ import annotations

from stoker.control.show.metrics.metric_table import GROUPS

_HEAD = """# Metrics for Prometheus

Made from the code by `python -m stoker.control.show.metrics.metric_docs`; a test keeps it current.

```bash
stoker metrics                        # http://127.0.0.1:9911/metrics: all runs of the folder, this machine, its GPUs
stoker metrics --once                 # print them and end
stoker metrics --hosts cluster.yaml   # several machines from one endpoint, by ssh; one that is gone has stoker_host_up 0
stoker run --metrics-port 9912 train.py    # one run's, while it runs; 0: a free port, which is printed
```

A background loop collects a snapshot every 2 s (`--interval`); a scrape gets the last one and asks nothing: a driver that hangs never hangs
Prometheus. `stoker_last_collect_timestamp_seconds` then grows old, and `StokerMetricsStale` fires. The server listens on loopback
(every user of the machine can read it; `--host` for another address: it has no password), answers GET for `/metrics` and `/` and nothing else, and on loopback refuses a foreign
Host header. From another machine: `ssh -L 9911:127.0.0.1:9911 box`.

A run is exported while it runs and for 15 minutes after its end; then its series end. `--metrics-port` starts a child that ends with the run,
so the verdict of a run is seen by a `stoker metrics` of its own. Without `--metrics-port` the launcher loads nothing of this.

## Prometheus, alerts, Grafana

`deploy/` of the repository has all three:

- `prometheus.yml` scrapes `stoker metrics` on this machine every 5 s and loads the alerts:
  `prometheus --config.file=deploy/prometheus.yml --storage.tsdb.path="$HOME/prometheus" --web.listen-address=127.0.0.1:9090`.
  Without that address Prometheus, which has no password, shows your runs to the whole network.
- `alerts.yml`: each alert says what to do. A GPU's Xid errors (48, 62, 64, 74, 79, 95, 119 and 120 critical, 94 a warning, and never 13, 31,
  43, 63 or 92), a lost or slowed-down GPU, a run that hangs, makes no progress, has a loss that is not a number, a slow rank, restarts again and
  again or failed, a full disk, a host that is gone, failed checks of the doctor, an exporter that is down or stale. `alerts_test.yml` fires
  each of them: `promtool test rules deploy/alerts_test.yml`.
- `grafana/training.json` and `grafana/gpus.json`: Dashboards → New → Import. Dashboards for dcgm-exporter work, too: `--dcgm classic`
  (the default) exports GPUs under the names that public dashboards use, `--dcgm 4.9` under those of dcgm-exporter 4.9, `off` under neither.
  Values that NVML does not have (`DCGM_FI_PROF_*`) are left out.

## Messages without Prometheus

`stoker run --notify TARGET` sends one line with the run, its state, step, loss, cause and how to look, when the run ends, restarts or is
refused. Nothing is sent when you stopped it yourself.

| target | what is used |
|---|---|
| `ntfy://TOPIC` | [ntfy](https://ntfy.sh): a topic that nobody can guess is its password; `ntfy://my.host/TOPIC` or `https://my.host/TOPIC` for a server of your own |
| `slack:URL` | an incoming webhook of Slack; the URL alone will do |
| `discord:URL` | a webhook of Discord; the URL alone will do |
| `mailto:ADDRESS` | `$STOKER_SMTP` (`smtp://user:password@host:587` or `smtps://…:465`) where it is set, else the `sendmail` program |
| anything else | a shell command: it gets the verdict as JSON on its stdin, also of a run that you stopped |

A message that fails is reported in one line and changes nothing; no more than 30 s are spent on it. Topics, webhooks and passwords are left out
of everything that is written (`stoker docs secrets`).

## Every metric

Units are base units; `NaN` and infinity are exported as they are. A value that is not known has no series. Labels never hold a step or a pid.
"""


def page() -> str:
    parts = [_HEAD]
    for title, rows in GROUPS.items():
        parts.append(f"\n### {title}\n\n| metric | labels | unit | meaning |\n|---|---|---|---|\n")
        for row in rows:
            labels = ", ".join(f"`{label}`" for label in row.labels)
            kind = " (counter)" if row.kind == "counter" else ""
            parts.append(f"| `{row.name}`{kind} | {labels} | {row.unit} | {row.text} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
