// Days of a report, which are UTC's, for the time axis of a chart, which is the reader's.

export interface Days {
  /** The midnight of each day where the reader is, so that the axis names a day by its own date. */
  x: number[];
  values: number[];
  /** The end of the last day. */
  until: number;
}

const DAY_MS = 86_400_000;

/** Each day from the first row's to the last one's; a day without a row is one without costs. The rows are in order. */
export function byDay(rows: { key: string; amount_micro_usd: number }[]): Days {
  const amounts = new Map(rows.map((row) => [row.key, row.amount_micro_usd]));
  const first = Date.parse(rows[0].key);
  const count = Math.round((Date.parse(rows.at(-1)!.key) - first) / DAY_MS) + 1;
  const keys = Array.from({ length: count + 1 }, (_, index) => new Date(first + index * DAY_MS).toISOString().slice(0, 10));
  const [until, ...x] = keys.map((key) => Date.parse(`${key}T00:00`) / 1000).reverse();
  return { x: x.reverse(), values: keys.slice(0, -1).map((key) => amounts.get(key) ?? 0), until };
}
