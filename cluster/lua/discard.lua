-- Give groups up: their pending members move to one final state, their payload is deleted.
-- Keys: group:<id> hash, trajectory:<id> hash, groups set (read), ready stream, waiting zset,
--       active zset, live set, gone sets, ledger hash, tally hash.
-- ARGV: "dropped" (any group that is not trained) | "abandoned" (open groups only), reason, groups ...
-- Returns the members moved.
local state, reason = ARGV[1], ARGV[2]
for i = 3, #ARGV do
  if call('SISMEMBER', base .. 'groups', ARGV[i]) == 0 then return unknown(ARGV[i], 0) end
end
local moved = 0
for i = 3, #ARGV do
  local now = call('HGET', key('group', ARGV[i]), 'state')
  if now and now ~= 'trained' and (state == 'dropped' or now == 'open') then
    moved = moved + discard(ARGV[i], state, reason)
  end
end
return moved
