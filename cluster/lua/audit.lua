-- Count trajectories from their own states, never from the ledger's counters.
-- Keys: live set, trajectory:<id> hash, gone set, gone:<name> sets (all read).
-- Returns field, count, field, count ... under the ledger's names. Atomic, and linear in live ones.
local counts = { admitted = 0, pending = 0, trained = 0 }
local function add(name, count)
  counts[name] = (counts[name] or 0) + count
  counts.admitted = counts.admitted + count
end
for _, id in ipairs(call('SMEMBERS', base .. 'live')) do
  local facts = call('HMGET', key('trajectory', id), 'state', 'reason')
  local state = facts[1] or 'missing'
  add(state == 'pending' and state or name_of(state, facts[2] or ''), 1)
end
for _, name in ipairs(call('SMEMBERS', base .. 'gone')) do
  add(name, call('SCARD', base .. 'gone:' .. name))
end
local flat = {}
for name, count in pairs(counts) do
  flat[#flat + 1] = name
  flat[#flat + 1] = count
end
return flat
