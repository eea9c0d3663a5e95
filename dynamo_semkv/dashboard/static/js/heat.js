// Where requests were placed against how loaded each live replica is now. Hot is said in words; bars only repeat the numbers.

import { badge, bar, byId, h, keyed, reconcile, show } from "./dom.js";
import * as f from "./format.js";

const SHOWN = 48;
const HOT = 1.5;
const COOL = 0.5;

export function heat(s) {
  const live = s.replicas.filter((row) => row.live);
  const placed = live.reduce((sum, row) => sum + row.placed_tokens, 0);
  const queued = live.reduce((sum, row) => sum + (row.queued_prefill_tokens ?? 0), 0);
  const rows = live.map((row) => ({ row, share: f.share(row.placed_tokens, placed), load: f.share(row.queued_prefill_tokens, queued) }));
  rows.sort((a, b) => (b.share ?? 0) - (a.share ?? 0) || (b.load ?? 0) - (a.load ?? 0));
  reconcile(byId("heat"), rows.slice(0, SHOWN).map(({ row, share, load }) => keyed(`${row.name} ${row.worker_id ?? ""}`, one(row, share, load, live.length))));
  show(byId("heat-title"), live.length > 0);
  const more = rows.length - SHOWN;
  byId("heat-note").textContent = live.length
    ? `Placed: share of the placed tokens on record. Load: share of the prefill tokens queued now. Hot is ${HOT} times an even share (${f.percent(1 / live.length)}) or more.${more > 0 ? ` ${f.count(more)} more in the table.` : ""}`
    : "";
}

function one(row, share, load, count) {
  const [text, kind] = verdict(share, load, count);
  const line = (name, value, colour) => h("div", { class: "pair" }, h("span", { class: "muted" }, name), bar(value, colour), h("b", {}, f.percent(value)));
  return h("li", {}, h("div", { class: "line" }, h("span", { class: "name" }, row.name), badge(text, kind)), line("Placed", share, "placed"), line("Load", load, "calm"));
}

function verdict(share, load, count) {
  if (share === null) return ["Nothing placed", "calm"];
  const even = 1 / count;
  if (count > 1 && share >= HOT * even) return load !== null && load >= HOT * even ? ["Hot and busy", "warn"] : ["Hot", "calm"];
  return share <= COOL * even ? ["Cool", "calm"] : ["Even", "calm"];
}
