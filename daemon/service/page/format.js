// Numbers, times and words as people read them.

const LEVEL_ORDER = ["healthy", "watch", "warning", "critical"];

export function percent(p) {
  if (p === null || p === undefined || Number.isNaN(p)) return "no data";
  if (p <= 0) return "0 %";
  if (p < 0.001) return "< 0.1 %";
  if (p >= 1) return "100 %";
  if (p > 0.999) return "> 99.9 %";
  return `${(p * 100).toFixed(p < 0.1 ? 1 : 0)} %`;
}

// The probability that the level goes by, the middle horizon, in words: "87 % in 1 h".
export function riskText(item) {
  const horizons = Object.keys(item.risk || {}).sort((a, b) => a - b);
  const middle = horizons[Math.min(1, horizons.length - 1)];
  if (middle === undefined) return percent(item.max_risk);
  return `${percent(item.risk[middle])} in ${horizonName(middle)}`;
}

export function rank(level) {
  return LEVEL_ORDER.indexOf(level);
}

export function horizonName(seconds) {
  const s = Number(seconds);
  if (s % 86400 === 0) return `${s / 86400} d`;
  if (s % 3600 === 0) return `${s / 3600} h`;
  return `${Math.round(s / 60)} min`;
}

// Seconds since the epoch from ISO text or a number; null when there is none.
export function seconds(value) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value === "number") return value;
  const parsed = Date.parse(value);
  return Number.isNaN(parsed) ? null : parsed / 1000;
}

export function clockTime(value, withDay) {
  const s = seconds(value);
  if (s === null) return "";
  const date = new Date(s * 1000);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  const today = new Date().toDateString() === date.toDateString();
  return withDay || !today ? `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}` : time;
}

export function ago(value) {
  const s = seconds(value);
  if (s === null) return "never";
  const passed = Date.now() / 1000 - s;
  if (passed < -5) return `in ${duration(-passed)}`;
  return passed < 2 ? "just now" : `${duration(passed)} ago`;
}

export function duration(value) {
  const s = Number(value);
  if (!Number.isFinite(s)) return "";
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(s < 36000 ? 1 : 0)} h`;
  return `${Math.round(s / 86400)} d`;
}

const UNITS = { celsius: "°C", watts: "W", hertz: "Hz", bytes: "B", seconds: "s", joules: "J" };

export function metricName(metric) {
  let words = metric.replace(/^(gpu|disk|host|node|training)_/, "").replace(/_total$/, "");
  const unit = Object.keys(UNITS).find((name) => words.endsWith(`_${name}`));
  if (unit) words = words.slice(0, -unit.length - 1);
  words = words.replace(/_ratio$/, "").replaceAll("_", " ");
  for (const name of ["ecc", "dram", "sram", "pcie", "nvlink", "crc", "sm", "nvme"]) {
    words = words.replace(new RegExp(`\\b${name}\\b`, "g"), name === "nvlink" ? "NVLink" : name === "pcie" ? "PCIe" : name.toUpperCase());
  }
  return words.charAt(0).toUpperCase() + words.slice(1);
}

export function metricValue(metric, value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "not reported";
  if (metric.endsWith("_ratio")) return percent(value);
  const name = Object.keys(UNITS).find((unit) => metric.replace(/_total$/, "").endsWith(`_${unit}`));
  const large = Math.abs(value) >= 1e4 && (name === "bytes" || name === "hertz" || name === "joules");
  if (large) {
    const power = Math.min(4, Math.floor(Math.log10(Math.abs(value)) / 3));
    return `${(value / 1000 ** power).toFixed(2)} ${["", "k", "M", "G", "T"][power]}${UNITS[name]}`;
  }
  const text = Number.isInteger(value) ? value.toLocaleString("en") : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  return name ? `${text} ${UNITS[name]}` : text;
}
