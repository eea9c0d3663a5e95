// Numbers, times and shares as text. `null` and what is no number show as a dash, never as zero.

export const DASH = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? whole.format(value) : DASH);
export const compact = (value) => (isNumber(value) ? short.format(value) : DASH);

const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const decimal = (value) => (isNumber(value) ? tenths.format(value) : DASH);

export function percent(share) {
  if (!isNumber(share)) return DASH;
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1 %";
  return `${value.toFixed(value >= 99.95 || value === 0 ? 0 : 1)} %`;
}

export const share = (part, total) => (isNumber(part) && isNumber(total) && total > 0 ? part / total : null);

export function seconds(value) {
  if (!isNumber(value)) return DASH;
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function duration(value) {
  if (!isNumber(value)) return DASH;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

export const time = (unix) => (isNumber(unix) ? clock.format(new Date(unix * 1000)) : DASH);
export const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
