// Reads a feed to its end with fetch and JSON.parse: node reader.mjs URL DIALECT
const [feed, dialect] = process.argv.slice(2);

function address(cursor) {
  const query =
    dialect === "v1"
      ? { n: "1", cursor0: cursor }
      : { token: "t", partition: "0", cursor };
  return `${feed}${dialect === "v1" ? "" : "/events"}?${new URLSearchParams(query)}`;
}

const started = process.hrtime.bigint();
let [total, cursor] = [0, "_first"];
for (;;) {
  const response = await fetch(address(cursor));
  if (!response.ok) throw new Error(`status ${response.status}`);
  let events = 0;
  for (const line of (await response.text()).split("\n")) {
    if (!line) continue;
    const record = JSON.parse(line);
    if (record.cursor === undefined) events += 1;
    else cursor = record.cursor;
  }
  if (events === 0) break;
  total += events;
}
console.log(total, Number(process.hrtime.bigint() - started) / 1e9);
