-- Mark an open group ready, or close it when too few members are valid.
-- Keys: group:<id> hash, trajectory:<id> hash, groups set (read), ready stream, waiting zset,
--       active zset, live set, gone sets, ledger hash, tally hash.
-- ARGV: group, attempt, least number of valid members
-- Returns 1 if the group is, or was, ready; 0 otherwise.
local group, attempt, least = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if call('SISMEMBER', base .. 'groups', group) == 0 then return unknown(group, attempt) end
local facts = call('HMGET', key('group', group), 'state', 'attempt', 'ready')
if facts[1] ~= 'open' then return facts[3] == '1' and 1 or 0 end
if attempt > tonumber(facts[2]) then return unknown(group, attempt) end
if attempt < tonumber(facts[2]) then return 0 end

local valid = 0
for _, id in ipairs(members_of(group)) do
  local member = call('HMGET', key('trajectory', id), 'state', 'end:' .. attempt)
  if member[1] == 'pending' then
    if not member[2] then return invalid('member ' .. id .. ' of group ' .. group .. ' has not ended') end
    valid = valid + 1
  end
end
if valid < least then
  discard(group, 'dropped', 'too_few_members')
  return 0
end
announce(group)
return 1
