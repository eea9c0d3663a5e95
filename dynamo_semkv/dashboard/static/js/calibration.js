// What was learned of each bucket: (replica, match type, overlap, tier) -> expected share, beside its prior.

import { bar, byId, cell, h, keyed, reconcile, show } from "./dom.js";
import * as f from "./format.js";
import { MATCHES, TIERS, word } from "./words.js";

const SHOWN = 60;

export function calibration(s) {
  const known = s.calibration;
  const cells = known.cells ?? [];
  const rows = cells.slice(0, SHOWN).map((row) =>
    keyed(
      `${row.replica} ${row.match_type} ${row.overlap} ${row.tier}`,
      h(
        "tr",
        {},
        cell("Replica", {}, h("b", {}, row.replica)),
        cell("Match", {}, word(MATCHES, row.match_type)),
        cell("Overlap", {}, row.overlap),
        cell("Tier", {}, word(TIERS, row.tier)),
        cell("Expected", { class: "num" }, h("span", {}, h("b", {}, f.percent(row.share)), bar(row.share, "materialized", row.prior))),
        cell("Prior", { class: "num" }, f.percent(row.prior)),
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
  if (known.enabled === false) types.push("Learning is off (scoring.calibration.enabled): the priors are in force.");
  else if (known.half_life_routes) types.push(`A trial counts half after ${f.count(known.half_life_routes)} routes; the prior counts as ${f.decimal(known.strength)}.`);
  if (count > SHOWN) types.push(`${f.count(count - SHOWN)} more at /api/snapshot.`);
  return types.join(" ");
}
