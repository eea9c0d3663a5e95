// Donor event streams, one a rank: whether their events are complete, and what they brought.

import { badge, byId, cell, h, keyed, reconcile, show } from "./dom.js";
import * as f from "./format.js";
import { STREAMS, word } from "./words.js";

export function donorStreams(s) {
  // Our connector's events carry an id made from the stable id, the same after a restart; others may carry Dynamo's own.
  const instances = new Set(s.replicas.map((row) => row.worker_id));
  const rows = (s.catalog.streams ?? []).map((row) => {
    const [state, kind] = word(STREAMS, row.quarantined ? "quarantined" : row.absent ? "absent" : "ok");
    return keyed(
      `${row.worker_id}/${row.dp_rank}`,
      h(
        "tr",
        {},
        cell("Replica", {}, h("span", {}, h("b", {}, row.replica ?? `${row.worker_id}/${row.dp_rank}`), row.replica ? h("small", { class: "mono", title: "The worker id in its events" }, `${instances.has(row.worker_id) ? "Dynamo instance" : "stable id"} ${row.worker_id}`) : null)),
        cell("State", {}, badge(state, kind)),
        cell("Generation", {}, h("code", {}, row.generation ?? f.DASH)),
        cell("Donors", { class: "num" }, f.count(row.donors)),
        cell("Next event", { class: "num" }, f.count(row.next_event_id)),
      ),
    );
  });
  reconcile(byId("streams"), rows);
  show(byId("streams-box"), rows.length > 0);
  show(byId("streams-empty"), rows.length === 0);
}
