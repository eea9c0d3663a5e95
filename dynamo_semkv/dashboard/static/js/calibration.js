// What was learned of each bucket: (replica, match type, overlap, tier) -> expected share, beside its prior, and what a token spares.

import { bar, byId, cell, h, keyed, reconcile, show } from "./dom.js";
import * as f from "./format.js";
import { MATCHES, TIERS, word } from "./words.js";

const SHOWN = 60;
const RATES = 8;

export function calibration(s) {
  const known = s.calibration;
  const cells = known.cells ?? [];
  const rows = cells.slice(0, SHOWN).map((row) =>
    keyed(
      `${row.replica} ${row.match_type} ${row.overlap} ${row.tier} ${row.mode ?? ""}`,
      h(
        "tr",
        {},
        cell("Replica", {}, h("b", {}, row.replica)),
        cell("Match", {}, word(MATCHES, row.match_type)),
        cell("Overlap", {}, row.overlap),
        cell("Tier", {}, word(TIERS, row.tier)),
        cell("Expected", { class: "num" }, h("span", {}, h("b", {}, f.percent(row.share)), bar(row.share, "materialized", row.prior))),
        cell("Prior", { class: "num" }, f.percent(row.prior)),
        cell("Saves", { class: "num" }, h("span", {}, f.percent(row.saving ?? null), h("small", {}, f.plural(Math.round(row.loads ?? 0), "load", "loads")))),
        cell("Trials left", { class: "num" }, h("span", {}, f.decimal(row.trials), h("small", {}, f.plural(row.routes, "route", "routes")))),
      ),
    ),
  );
  reconcile(byId("calibration"), rows);
  show(byId("calibration-box"), rows.length > 0);
  show(byId("calibration-empty"), rows.length === 0);
  byId("calibration-note").textContent = summary(known, cells.length);
}

function summary(known, count) {
  const types = Object.entries(known.match_types ?? {}).map(([name, row]) => `${word(MATCHES, name)}: ${f.percent(row.share)} over ${f.decimal(row.trials)} trials.`);
  for (const [name, row] of Object.entries(known.tiers ?? {})) {
    if (row.loads > 0) types.push(`From ${word(TIERS, name).toLowerCase()}, a token spares ${f.percent(row.saving)} of its prefill, over ${f.decimal(row.loads)} loads.`);
  }
  const rates = (known.prefill ?? []).slice(0, RATES).map((row) => `${row.replica} ${f.count(Math.round(row.tokens_per_second))}`);
  if (rates.length > 0) types.push(`Measured prefill, tokens a second: ${rates.join(", ")}${known.prefill.length > RATES ? ", …" : ""}.`);
  const liars = known.clocks_not_believed ?? [];
  if (liars.length > 0) types.push(`Load times not believed, since first tokens came later than they say: ${liars.slice(0, RATES).join(", ")}${liars.length > RATES ? ", …" : ""}.`);
  if (known.enabled === false) types.push("Learning is off (scoring.calibration.enabled): the priors are in force.");
  else if (known.half_life_routes) types.push(`A trial counts half after ${f.count(known.half_life_routes)} routes; the prior counts as ${f.decimal(known.strength)}.`);
  if (count > SHOWN) types.push(`${f.count(count - SHOWN)} more at /api/snapshot.`);
  return types.join(" ");
}
